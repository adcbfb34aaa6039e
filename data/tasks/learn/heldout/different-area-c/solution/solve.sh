sqlite3 c.db 'select count(distinct area) from t' > answer.txt
