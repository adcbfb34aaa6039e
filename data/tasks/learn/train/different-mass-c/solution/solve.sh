sqlite3 c.db 'select count(distinct mass) from t' > answer.txt
